"""What tests share: a tiny target with a real tokenizer, chats, and processes started with a time limit."""
