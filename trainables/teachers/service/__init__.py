"""The teacher as a service (`teacher.service`): one network answers for several students, in processes of its own."""
