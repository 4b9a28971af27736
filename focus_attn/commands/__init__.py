"""What `focus` is asked for, a file for each command. What a command needs is imported when it runs: help, and the
answer to a mistyped option, do not wait for torch."""
