"""The tensor language model (TLM): configs as sentences, and a transformer that writes them."""
