"""The teacher as a service (`teacher.service`): Ray actors compute its logits for several students."""
