"""What a running loop shows: counts and times, profiles, traces."""
