"""The engine on Flower's Grid, what a site answers, and a whole deployment on one machine; needs expunge[flower]."""
