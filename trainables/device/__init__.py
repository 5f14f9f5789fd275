"""What happens to a batch on its way into the models: the copy to the device, augmentation and normalization there."""
