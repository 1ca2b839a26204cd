"""The manager in plain Python: what every call of a cache must do, written with lists and dicts from the documented
semantics. Slow, small, and without a hash in it.

A block remembers its rows: for each token slot the token, whether it is settled (known and certain), and a number that
stands for its K and V. A full block of settled tokens has a key, the namespace and all tokens up to its end. Of the
blocks with one key the first is registered; the others are duplicates until it is gone.
"""
from conformance.eviction_oracle import Oracle


class Refused(Exception):
    """The call changes nothing. kind: "invalid", "busy", "shortage" (not now), "never" (one sequence longer than the
    pool)."""

    def __init__(self, kind, needed=None, available=None):
        super().__init__(kind)
        self.kind, self.needed, self.available = kind, needed, available


class Row:
    def __init__(self, token, is_settled, value):
        self.token, self.is_settled, self.value = token, is_settled, value


class Block:
    def __init__(self, block_size):
        self.rows = [None] * block_size
        self.holders = 1
        self.key = None
        self.id = None  # the library's, once seen
        self.priority = self.hint = None  # the largest of the sequences that released it; set by retain

    @property
    def level(self):
        return self.hint if self.hint is not None else self.priority or 0


class Sequence:
    def __init__(self, namespace, priority):
        self.namespace, self.priority = namespace, priority
        self.table, self.length, self.settled = [], 0, 0
        self.num_cached, self.has_appended = 0, False
        self.opened = self.stepped = self.changed = self.num_steps = 0


class Part:
    """One sequence's share of a step, with what it takes to undo it."""

    def __init__(self, seq, tokens):
        self.seq, self.tokens = seq, tokens
        self.length, self.settled, self.num_blocks = seq.length, seq.settled, len(seq.table)
        self.has_appended = seq.has_appended
        self.source = None  # block that was copied
        self.took_reserved = False


class ManagerModel:
    def __init__(self, num_blocks, block_size, prefix_caching, eviction="lru"):
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.eviction = eviction
        self.sequences = []
        self.registered = {}   # key -> block
        self.duplicates = {}   # key -> blocks with the same key, the newest first
        self.cached = []       # registered blocks that nobody holds
        self.order = Oracle(eviction, num_blocks)
        self.serial = 0
        self.next_value = 1
        self.evictions = self.copies = self.hit_tokens = self.queried_tokens = self.appended_tokens = 0

    # -- counts --------------------------------------------------------------------------------------------------

    def held(self):
        return {id(block): block for seq in self.sequences for block in seq.table}

    def num_uncached(self):
        return self.num_blocks - len(self.held()) - len(self.cached)

    def num_available(self):
        return self.num_uncached() + len(self.cached)

    def count_blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    # -- blocks --------------------------------------------------------------------------------------------------

    def evict_first(self):
        block = self.order.victim()
        self.cached.remove(block)
        self.drop_key(block)
        self.evictions += 1

    def take(self, count):
        for _ in range(count - self.num_uncached()):
            self.evict_first()
        return [Block(self.block_size) for _ in range(count)]

    def hold(self, block):
        if block.holders == 0:
            self.cached.remove(block)
            self.order.hold(block)
        block.holders += 1

    def raise_priority(self, block, seq):
        if self.eviction == "priority":
            block.priority = seq.priority if block.priority is None else max(block.priority, seq.priority)

    def release(self, blocks, seq):
        for block in reversed(blocks):
            self.raise_priority(block, seq)
            block.holders -= 1
            if block.holders:
                continue
            if block.key is not None and self.registered[block.key] is block:
                self.cached.append(block)
                self.order.cache(block)
            elif block.key is not None:
                self.drop_key(block)

    def set_key(self, block, key):
        block.key, block.priority = key, None
        if key in self.registered:
            self.duplicates.setdefault(key, []).insert(0, block)
        else:
            self.registered[key] = block

    def drop_key(self, block):
        self.order.forget(block)
        block.priority = None
        key, block.key = block.key, None
        twins = self.duplicates.get(key, [])
        if self.registered[key] is not block:
            twins.remove(block)
        elif twins:
            self.registered[key] = twins.pop(0)
        else:
            del self.registered[key]

    def settle(self, seq, keyed=None, first_new=0):
        """Moves over the known tokens behind the settled ones; blocks that become full get their key. Those of them
        that hold tokens from first_new on go into keyed."""
        first = seq.settled // self.block_size
        while seq.settled < seq.length and self.row(seq, seq.settled).is_settled:
            seq.settled += 1
        if not self.prefix_caching:
            return
        for index in range(first, seq.settled // self.block_size):
            block = seq.table[index]
            if block.key is None:
                tokens = [self.row(seq, i).token for i in range((index + 1) * self.block_size)]
                self.set_key(block, (seq.namespace, tuple(tokens)))
                if keyed is not None and index >= first_new // self.block_size:
                    keyed.append(block)

    def row(self, seq, position):
        return seq.table[position // self.block_size].rows[position % self.block_size]

    # -- calls ---------------------------------------------------------------------------------------------------

    def find_prefix(self, namespace, tokens, first):
        found = []
        if self.prefix_caching:
            for end in range((first + 1) * self.block_size, len(tokens), self.block_size):
                block = self.registered.get((namespace, tuple(tokens[:end])))
                if block is None:
                    break
                found.append(block)
        return found

    def take_prefix(self, seq, found):
        first = seq.length // self.block_size
        for block in found:
            self.hold(block)
            self.order.hit(block)
        seq.table[first:first] = found
        seq.length += len(found) * self.block_size
        seq.settled = seq.num_cached = seq.length
        self.hit_tokens += len(found) * self.block_size

    def finish(self, seq=None):
        self.serial += 1
        if seq is not None:
            seq.changed = self.serial

    def open(self, tokens, namespace, priority):
        seq = Sequence(namespace, priority)
        self.sequences.append(seq)
        self.queried_tokens += len(tokens)
        self.take_prefix(seq, self.find_prefix(namespace, tokens, 0))
        self.finish(seq)
        seq.opened = seq.stepped = self.serial
        return seq

    def rematch(self, seq, tokens):
        own = [self.row(seq, i).token for i in range(seq.length)]
        if seq.has_appended or seq.length % self.block_size or tokens[: seq.length] != own:
            raise Refused("invalid")
        found = self.find_prefix(seq.namespace, tokens, seq.length // self.block_size)
        if found:
            self.take_prefix(seq, found)
        self.finish(seq)

    def fork(self, parent, length):
        if length is None:
            length = parent.length
        if length > parent.length:
            raise Refused("invalid")
        child = Sequence(parent.namespace, parent.priority)
        child.table = parent.table[: self.count_blocks(length)]
        for block in child.table:
            self.hold(block)
        child.length, child.settled = length, min(parent.settled, length)
        child.num_cached, child.has_appended = min(parent.num_cached, length), parent.has_appended
        self.sequences.append(child)
        self.finish(child)
        child.opened, child.stepped, child.num_steps = self.serial, parent.stepped, parent.num_steps
        return child

    def reserve(self, seq, num_tokens):
        length = seq.length + num_tokens
        if self.count_blocks(length) > self.num_blocks:
            raise Refused("never")
        is_copied = num_tokens > 0 and seq.length % self.block_size and self.partial(seq).holders > 1
        needed = self.count_blocks(length) + bool(is_copied) - len(seq.table)
        if needed > self.num_available():
            raise Refused("shortage", needed, self.num_available())
        seq.table += self.take(max(needed, 0))
        self.finish(seq)

    def partial(self, seq):
        return seq.table[seq.length // self.block_size]

    def prepare(self, work, registers, ahead=0):
        """work: list of (sequence, tokens), None for an unknown token. Returns the step, for discard. ahead: tokens that
        each sequence has to have blocks for behind these."""
        parts = [Part(seq, tokens) for seq, tokens in work]
        holders, needs = {}, []
        for part in parts:
            seq = part.seq
            new_length = part.length + len(part.tokens)
            if self.count_blocks(new_length + ahead) > self.num_blocks:
                raise Refused("never")
            fresh = self.count_blocks(new_length + ahead) - part.num_blocks
            if part.tokens and part.length % self.block_size:
                block = self.partial(seq)
                if holders.setdefault(id(block), block.holders) > 1:
                    holders[id(block)] -= 1
                    part.source, part.took_reserved = block, fresh < 0
                    fresh += 1
            needs.append(max(fresh, 0))
        if sum(needs) > self.num_available():
            raise Refused("shortage", sum(needs), self.num_available())
        new, keyed = self.take(sum(needs)), []
        self.serial += 1
        for part in parts:
            self.apply(part, new, registers, ahead)
        assert not new
        for part in parts:
            self.settle(part.seq, keyed, part.length)  # blocks that were full before are true, whatever fails
        return {"parts": parts, "keyed": keyed, "serial": self.serial, "is_discarded": False}

    def apply(self, part, new, registers, ahead):
        seq = part.seq
        index = part.length // self.block_size
        if part.source is not None:
            copy = seq.table.pop() if part.took_reserved else new.pop(0)
            copy.rows = [row and Row(row.token, row.is_settled, row.value) for row in part.source.rows]
            self.raise_priority(part.source, seq)
            part.source.holders -= 1
            seq.table[index] = copy
            self.copies += 1
        elif part.tokens and part.length % self.block_size and seq.table[index].key is not None:
            self.drop_key(seq.table[index])
        while len(seq.table) < self.count_blocks(part.length + len(part.tokens) + ahead):
            seq.table.append(new.pop(0))
        self.write(seq, part.tokens, registers)
        seq.has_appended = seq.has_appended or bool(part.tokens)
        seq.changed = seq.stepped = self.serial
        seq.num_steps += 1

    def write(self, seq, tokens, registers):
        for token in tokens:
            seq.table[seq.length // self.block_size].rows[seq.length % self.block_size] = \
                Row(token, registers and token is not None, self.next_value)
            self.next_value += 1
            seq.length += 1
        self.appended_tokens += len(tokens)

    def settle_steps(self, step, tokens, registers):
        """What a device has appended by itself: tokens of each sequence, in blocks that it has."""
        if step["is_discarded"]:
            raise Refused("invalid")
        for part, own in zip(step["parts"], tokens):
            if own and part.seq.changed != step["serial"]:
                raise Refused("invalid")
        step["is_discarded"] = True
        self.serial += 1
        for part, own in zip(step["parts"], tokens):
            if own:
                self.write(part.seq, own, registers)
                self.settle(part.seq)
                part.seq.changed = part.seq.stepped = self.serial
                part.seq.num_steps += len(own)

    def discard(self, step):
        """Takes a step back; all of its sequences are still open."""
        parts = step["parts"]
        if step["is_discarded"] or any(part.seq.changed != step["serial"] for part in parts):
            raise Refused("invalid")
        # What the step wrote must be held by its own sequences alone.
        holds = [block for part in parts if part.tokens for block in
                 part.seq.table[part.length // self.block_size: self.count_blocks(part.length + len(part.tokens))]]
        if any(holds.count(block) != block.holders for block in holds):
            raise Refused("busy")
        step["is_discarded"] = True
        for block in step["keyed"]:
            if block.key is not None:
                self.drop_key(block)
        is_latest = step["serial"] == self.serial
        # A copy stays where the cache was used since, or its source was written in place below the copied length.
        in_place = {}
        for part in parts:
            if part.tokens and part.source is None and part.length % self.block_size:
                in_place[id(self.row_block(part))] = part.length
        for part in reversed(parts):
            seq = part.seq
            kept = part.num_blocks - part.took_reserved
            self.release(seq.table[kept:], seq)
            del seq.table[kept:]
            if part.source is not None and is_latest and in_place.get(id(part.source), part.length) >= part.length:
                index = part.length // self.block_size
                copy, seq.table[index] = seq.table[index], part.source
                self.hold(part.source)
                if part.took_reserved:
                    seq.table.append(copy)
                else:
                    self.release([copy], seq)
            seq.length, seq.settled, seq.has_appended = part.length, part.settled, part.has_appended
        self.serial += 1
        for part in parts:
            part.seq.changed = self.serial

    def row_block(self, part):
        return part.seq.table[part.length // self.block_size]

    def commit(self, seq, tokens):
        if len(tokens) > seq.length - seq.settled:
            raise Refused("invalid")
        rows = [self.row(seq, seq.settled + i) for i in range(len(tokens))]
        if any(row.token is not None and row.token != token for row, token in zip(rows, tokens)):
            raise Refused("invalid")
        for row, token in zip(rows, tokens):
            row.token, row.is_settled = token, True
        self.settle(seq)
        self.finish(seq)

    def truncate(self, seq, length):
        if length > seq.length:
            raise Refused("invalid")
        kept = self.count_blocks(length)
        self.release(seq.table[kept:], seq)
        del seq.table[kept:]
        seq.length, seq.settled = length, min(seq.settled, length)
        self.finish(seq)

    def close(self, seq):
        self.release(seq.table, seq)
        self.sequences.remove(seq)
        self.finish()

    def retain(self, seq, start, end, priority):
        if end > seq.length:
            raise Refused("invalid")
        for block in seq.table[start // self.block_size: self.count_blocks(end)] if end > start else []:
            self.order.leave(block)
            block.hint = priority
        self.finish()

    def touch(self, tokens, namespace):
        found = self.find_prefix(namespace, tokens + [0], 0)
        for block in found:
            self.hold(block)
            self.order.hit(block)
        for block in reversed(found):
            block.holders -= 1
            if not block.holders:
                self.cached.append(block)
                self.order.cache(block)
        self.finish()
        return len(found) * self.block_size

    def evict(self, count):
        if count > self.num_available():
            raise Refused("shortage", count, self.num_available())
        before = self.evictions
        while self.num_uncached() < count:
            self.evict_first()
        self.finish()
        return self.evictions - before

    def reset(self):
        if self.sequences:
            raise Refused("busy")
        while self.cached:
            self.drop_key(self.cached.pop(0))
        self.order.ghosts.clear()
        self.finish()

    def victims(self, count):
        rank = {"fifo": "opened", "lru": "stepped", "priority": "stepped"}.get(self.eviction, "num_steps")
        order = sorted(self.sequences, key=lambda seq: (seq.priority, getattr(seq, rank), -seq.opened))
        left = {key: block.holders for key, block in self.held().items()}
        gained, chosen = 0, []
        for seq in order:
            if gained >= count:
                break
            chosen.append(seq)
            for block in seq.table:
                left[id(block)] -= 1
                gained += left[id(block)] == 0
        if gained < count:
            raise Refused("shortage", count, gained)
        return chosen
