"""The tensor language model (TLM): configs as sentences, and a small transformer that writes them."""
