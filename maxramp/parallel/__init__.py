"""What devices and processes share: the mesh, and how processes meet, agree and end."""
