"""Tools for run directories and hosts: score, predict, export, report, verify, examine."""
