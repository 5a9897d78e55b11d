"""Reading recipe files safely, whoever wrote them."""
