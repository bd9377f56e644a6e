"""One backend a vendor, and what each reads from its vendor's libraries and from the kernel."""
