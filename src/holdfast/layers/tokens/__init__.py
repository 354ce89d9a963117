"""Where tokens come from, where they go and how they are joined."""
