"""What is measured of a training: where its time goes, its speed, its hardware, its gradients' noise."""
