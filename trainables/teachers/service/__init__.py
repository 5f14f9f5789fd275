"""The teacher as a service (`teacher.service`): Ray actors compute its outputs for several students."""
