"""Reads the families of encoders: BERT, RoBERTa, MPNet, ModernBERT, Nomic BERT and EuroBERT."""
