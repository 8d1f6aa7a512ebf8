"""Model families, a file each, and the table of them that `decoder_block` chooses from."""
