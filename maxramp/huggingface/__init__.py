"""Models in Hugging Face's folders: what they say, their tensors in and out."""
