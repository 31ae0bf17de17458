"""What swapped language models cost while they write."""
