"""Loading of images, audio, texts and streams, beside loaders by hand."""
