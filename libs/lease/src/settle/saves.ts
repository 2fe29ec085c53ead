import { Injectable, Logger } from '@nestjs/common';
import type { HeldLease } from '../claim/held-leases';
import { CheckpointError, LeaseLostError } from '../errors';
import { ThrottledLog } from '../events/throttled-log';
import type { JobProgress } from '../jobs/job.types';
import { Database } from '../storage/database';
import { backoffMs, monotonicMs, sleep } from '../storage/delays';
import { LOG_LINES } from '../storage/schema/functions/save.sql';
import { errorText, isContentError } from '../storage/sql-errors';
import { saveSql } from './saves.sql';

/** Progress and log lines are written together, at most this long after they were said. */
const NOTES_AFTER_MS = 1000;
const MAX_BATCH = 500;
/** Tries for the notes of a run that has ended, while somebody else has its lease locked. */
const LOCKED_TRIES = 3;

interface Note {
  progress?: JobProgress;
  lines: { at: number; text: string }[];
}

interface Checkpoint {
  json: string;
  version: number;
  saved: { resolve: () => void; reject: (error: unknown) => void }[];
}

interface Unsaved {
  lease: HeldLease;
  note: Note | undefined;
  checkpoint: Checkpoint | undefined;
  /** Times that somebody else had the lease locked, and until when it waits for that, on the monotonic clock. */
  locked: number;
  notBefore: number;
}

interface SavedRow extends Record<string, unknown> {
  job: string;
  token: string;
  cancel: boolean;
  pause: boolean;
  busy: boolean;
}

/**
 * Writes what running jobs save, under their leases. What is saved while one write is on the wire goes out together with the next: the
 * last checkpoint of a job, its last progress, its lines. Each write also brings the stop requests on the lease, or that it is lost.
 */
@Injectable()
export class Saves {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private readonly unsaved = new Map<string, Unsaved>();
  private writing: Promise<void> | undefined;
  /** There is something to be written now. */
  private due = false;
  private timer: NodeJS.Timeout | undefined;
  private retry: NodeJS.Timeout | undefined;
  private onWire: ReadonlySet<string> = new Set();
  /** Called after the next write. */
  private rounds: (() => void)[] = [];

  constructor(private readonly database: Database) {}

  /** Resolves when it is stored. @throws LeaseLostError; CheckpointError for what the database refuses */
  checkpoint(lease: HeldLease, json: string, version: number): Promise<void> {
    const entry = this.entryOf(lease);
    const saved = new Promise<void>((resolve, reject) => {
      // One that has not been sent yet is superseded; whoever waits for it waits for this one.
      entry.checkpoint = { json, version, saved: [...(entry.checkpoint?.saved ?? []), { resolve, reject }] };
    });
    this.write();
    return saved;
  }

  /** Replaces what was last said of the progress. */
  progress(lease: HeldLease, progress: JobProgress): void {
    this.noteOf(lease).progress = progress;
  }

  log(lease: HeldLease, text: string): void {
    const { lines } = this.noteOf(lease);
    lines.push({ at: monotonicMs(), text });
    if (lines.length > LOG_LINES) lines.shift();
  }

  /** Writes the notes of a job whose run ends, since they could not be written after it. Never throws: they are only notes. */
  async flush(lease: HeldLease): Promise<void> {
    const { key } = lease.job;
    // What was tried while the handler had it locked itself does not count.
    const kept = this.unsaved.get(key);
    if (kept) kept.locked = kept.notBefore = 0;
    while (lease.saving && !lease.lost && (this.onWire.has(key) || this.unsaved.has(key))) {
      const locked = this.unsaved.get(key)?.locked ?? 0;
      if (locked >= LOCKED_TRIES) return this.dropNotes(lease);
      if (locked === 0 && this.unsaved.has(key)) this.write();
      // One write, not all that others go on to give.
      await new Promise<void>((resolve) => this.rounds.push(resolve));
    }
  }

  private dropNotes({ job: { key } }: HeldLease): void {
    const entry = this.unsaved.get(key);
    if (entry?.checkpoint) entry.note = undefined;
    else this.unsaved.delete(key);
  }

  private entryOf(lease: HeldLease): Unsaved {
    const { key } = lease.job;
    const known = this.unsaved.get(key);
    if (known) return known;
    const entry: Unsaved = { lease, note: undefined, checkpoint: undefined, locked: 0, notBefore: 0 };
    this.unsaved.set(key, entry);
    lease.saving = true;
    return entry;
  }

  private noteOf(lease: HeldLease): Note {
    const entry = this.entryOf(lease);
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.write();
    }, NOTES_AFTER_MS).unref();
    return (entry.note ??= { lines: [] });
  }

  private write(): void {
    this.due = true;
    this.writing ??= this.writeAll().finally(() => {
      this.writing = undefined;
      // What was given between the last look and here.
      if (this.due) this.write();
    });
  }

  private async writeAll(): Promise<void> {
    // What is saved in this turn goes together.
    await new Promise<void>((resolve) => setImmediate(resolve));
    for (let failures = 0; this.due;) {
      const batch = this.takeBatch();
      this.onWire = new Set(batch.map(({ lease }) => lease.job.key));
      try {
        if (batch.length > 0) await this.send(batch);
        failures = 0;
      } catch (error) {
        this.trouble.warn('save', `Could not save checkpoints, trying again: ${errorText(error)}`);
        for (const entry of batch) this.putBack(entry);
        this.due = this.unsaved.size > 0;
        this.onWire = new Set();
        await sleep(backoffMs(failures++, 20, 1000));
      }
      this.onWire = new Set();
      for (const resolve of this.rounds.splice(0)) resolve();
    }
    this.armRetry();
  }

  /** Notes alone wait for their time, and what is locked for its next try. */
  private takeBatch(): Unsaved[] {
    const now = monotonicMs();
    const ready = [...this.unsaved.values()].filter(({ notBefore }) => notBefore <= now);
    this.due = ready.length > MAX_BATCH;
    const batch = ready.slice(0, MAX_BATCH);
    for (const { lease } of batch) this.unsaved.delete(lease.job.key);
    return batch;
  }

  /** Somebody else has the lease locked, a transaction of the handler's for example: the others go on, this one comes again. */
  private sendLater(locked: Unsaved): void {
    const pauseMs = backoffMs(locked.locked, 20, 1000);
    this.putBack(locked);
    const entry = this.unsaved.get(locked.lease.job.key);
    if (!entry) return;
    entry.locked = locked.locked + 1;
    entry.notBefore = monotonicMs() + pauseMs;
  }

  private armRetry(): void {
    clearTimeout(this.retry);
    const waits = [...this.unsaved.values()].filter(({ locked }) => locked > 0);
    if (waits.length === 0) return;
    const leftMs = Math.min(...waits.map(({ notBefore }) => notBefore)) - monotonicMs();
    this.retry = setTimeout(() => this.write(), Math.max(1, Math.ceil(leftMs))).unref();
  }

  /** A checkpoint that was given meanwhile is newer. Nothing is tried for a lease that nobody believes in any more, or whose run has ended. */
  private putBack({ lease, note, checkpoint }: Unsaved): void {
    if (lease.lost || lease.ended) {
      for (const { reject } of checkpoint?.saved ?? []) reject(new LeaseLostError(lease.job.id, lease.job.token));
      return;
    }
    const entry = this.entryOf(lease);
    if (checkpoint) {
      const newer = entry.checkpoint;
      entry.checkpoint = newer ? { ...newer, saved: [...checkpoint.saved, ...newer.saved] } : checkpoint;
    }
    if (note) {
      const { progress = note.progress, lines = [] } = entry.note ?? {};
      entry.note = { ...(progress ? { progress } : {}), lines: [...note.lines, ...lines].slice(-LOG_LINES) };
    }
  }

  private async send(batch: Unsaved[]): Promise<void> {
    const now = monotonicMs();
    let rows: SavedRow[];
    try {
      rows = await this.database.query<SavedRow>(
        saveSql(this.database.schema.quoted),
        [`[${batch.map((entry) => encode(entry, now)).join(',')}]`],
        { name: 'leasehold_save' },
      );
    } catch (error) {
      if (!isContentError(error)) throw error;
      return this.sendParts(batch, error);
    }
    const held = new Map(rows.map((row) => [`${row.job}:${row.token}`, row]));
    for (const entry of batch) {
      const { lease, checkpoint } = entry;
      const row = held.get(lease.job.key);
      if (row?.busy) {
        this.sendLater(entry);
        continue;
      }
      if (!row) {
        if (!lease.settling) lease.interrupt('lease-lost');
        for (const { reject } of checkpoint?.saved ?? []) reject(new LeaseLostError(lease.job.id, lease.job.token));
        continue;
      }
      if (row.cancel) lease.interrupt('cancelled');
      else if (row.pause) lease.interrupt('paused');
      for (const { resolve } of checkpoint?.saved ?? []) resolve();
    }
  }

  /** One bad row must not keep the others from being saved. */
  private async sendParts(batch: Unsaved[], error: unknown): Promise<void> {
    const [only] = batch;
    if (batch.length > 1) {
      const half = Math.ceil(batch.length / 2);
      await this.send(batch.slice(0, half));
      await this.send(batch.slice(half));
    } else if (only?.checkpoint) {
      const refused = new CheckpointError(`The checkpoint could not be stored: ${errorText(error)}`, { cause: error });
      for (const { reject } of only.checkpoint.saved) reject(refused);
    } else {
      this.trouble.warn('notes', `A progress note or log line could not be stored: ${errorText(error)}`);
    }
  }
}

function encode({ lease: { job }, note, checkpoint }: Unsaved, now: number): string {
  const rest = {
    job: job.id,
    token: job.token,
    worker: job.workerId,
    ...(note?.progress ? { progress: note.progress } : {}),
    ...(note && note.lines.length > 0 ? { lines: note.lines.map(({ at, text }) => [Math.round(now - at), text]) } : {}),
    ...(checkpoint ? { version: checkpoint.version } : {}),
  };
  const json = JSON.stringify(rest);
  return checkpoint ? `${json.slice(0, -1)},"checkpoint":${checkpoint.json}}` : json;
}
