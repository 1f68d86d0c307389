"""The live page of a running job: what it does now, read over HTTP from this machine only."""
