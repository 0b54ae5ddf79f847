"""rowferry."""
