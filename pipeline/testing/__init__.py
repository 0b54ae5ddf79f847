"""What tests of the pipeline are built from."""
