"""What processes 0, 511 and 1,023 of 1,024 do at the start of a run, simulated on one machine."""
