"""What the commands do: a file a command, and underscored files for what they share."""
