"""Terminal output: tables and text for runs, plans, profiles and comparisons."""
