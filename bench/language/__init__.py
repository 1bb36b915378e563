"""The pipeline of the tensor language model (TLM): sentences, training, fine-tuning, evaluation."""
