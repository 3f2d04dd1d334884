"""The classes of single images, prepared exactly as an evaluation prepares them."""
