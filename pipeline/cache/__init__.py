"""The cache of hidden states: a folder that a capture writes once and every training run reads (DESIGN §4)."""
