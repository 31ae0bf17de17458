"""The pages on RPC-Attention."""
