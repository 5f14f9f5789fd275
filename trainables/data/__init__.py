"""The input pipeline: a source of images, their order, a decoder, augmentation, and the loader that builds batches."""
