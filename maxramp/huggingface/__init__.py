"""Models in Hugging Face's folders: config.json, tokenizers, tensors in and out."""
