"""What forwards, rounds and drafts take: tables that were measured and kept, and a safe guess where there is none."""
