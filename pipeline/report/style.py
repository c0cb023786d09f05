"""How the report looks: the reader's own fonts, one accent colour, light or dark as the reader has it."""

STYLE = """
:root{--bg:#fff;--text:#1d2329;--faint:#69737d;--line:#e3e7eb;--soft:#f5f7f9;--accent:#0b6bcb;--bad:#b42318}
@media (prefers-color-scheme:dark){:root{--bg:#14181c;--text:#e4e8ec;--faint:#93a0ac;
--line:#2a3138;--soft:#1b2127;--accent:#62b0f5;--bad:#ff8a7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 28px 80px}
h1{font-size:26px;font-weight:650;letter-spacing:-.01em;margin:0 0 20px}
h2{font-size:17px;font-weight:620;margin:44px 0 10px;padding-top:14px;border-top:1px solid var(--line)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px}
.tiles div{background:var(--soft);border-radius:8px;padding:14px 16px}
.tiles b{display:block;font-size:25px;font-weight:620;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.tiles div:first-child b{color:var(--accent)}
.tiles span{display:block;font-size:13px}
.tiles i{overflow-wrap:anywhere;display:block;font-style:normal;font-size:12px;color:var(--faint);margin-top:4px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;font-size:12px;color:var(--faint);padding:6px 12px 6px 0;
border-bottom:1px solid var(--line);white-space:nowrap}
td{padding:7px 12px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
.n{text-align:right;white-space:nowrap}
tbody tr:hover{background:var(--soft)}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
td code{white-space:nowrap}
td code.long{display:inline-block;min-width:18em;white-space:normal;overflow-wrap:anywhere}
pre{background:var(--soft);border-radius:8px;padding:12px 16px;white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0 14px}
.note{color:var(--faint);font-size:13px;max-width:820px;margin:6px 0 12px}
.faint{color:var(--faint);font-weight:400}
.error{color:var(--bad)}
img{display:block;max-width:100%;min-width:320px;height:auto}
"""
