"""What a sweep varies, and the folder that it writes."""
