"""What users call: functions of DataFrames, and what is checked before a plan is built."""
