"""What a running rank records, and how anybody reads it back.

The writing half (``recorder``, ``communication``, ``callback``) runs inside training and may use
torch and Lightning. The reading half (``layout``, ``job``, ``reader``, ``snapshot``) imports
neither, so that the dashboard is on the screen at once.
"""
