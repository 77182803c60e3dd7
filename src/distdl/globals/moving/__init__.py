"""How tensors come to lie where they are needed, and how plain ones become global."""
