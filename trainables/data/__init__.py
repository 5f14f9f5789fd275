"""The input path: a source of images, an order, a decoder, an augmentation, and the loader that makes batches of them."""
