"""Searches of the compared systems: each ends in a policy file that trains like a published one."""
