"""What data modules share: files, loaders, transforms, tokenizers, images."""
