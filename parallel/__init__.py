"""What modules need to run on many ranks: the mesh, FSDP2, sharded weights, clipping."""
