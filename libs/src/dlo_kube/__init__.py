"""The one door to the API server: objects are plain JSON values, errors are few, every call has a time limit."""
