"""What runs in a Ray Train worker. Only here is ray.train known on the workers' side."""
