"""Model directories on this machine: fetched, converted, checked, and found again by their URI."""
