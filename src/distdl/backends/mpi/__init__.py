"""The MPI back-end, and the published names that only make sense with MPI. Nothing here is imported before use."""
