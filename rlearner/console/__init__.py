"""The console: what people who keep runs alive look at in a browser."""
