"""The decode loop: requests, their scheduling, and one step of all."""
