"""Two-stage training of DFlash drafts: capture a frozen target's hidden states once, train many drafts from them."""
