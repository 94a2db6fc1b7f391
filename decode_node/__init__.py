"""A decode instance: pulls the K/V of prompts from the store into its pages and streams tokens from one continuous batch."""
