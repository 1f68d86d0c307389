"""The faults of scripts/fault_table.py, by what they break."""
