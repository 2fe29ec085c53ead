import type { Type } from '@nestjs/common';
import type { Job, JobStatus } from '../jobs/job.types';
import type { HandlerOptions } from '../options/lease-options';
import type { Lease } from './lease';

/**
 * Runs jobs of one kind. What it returns is stored as the result; what it throws fails the attempt (NonRetryableError: for good,
 * SnoozeError: later, without spending an attempt). When `lease.signal` aborts it should stop at its next boundary, by throwing.
 * A job runs *at least once*: effects outside the database need `lease.token` or `lease.key(item)`.
 */
export interface Handler<P = unknown, R = unknown, C = unknown> {
  handle(job: Job<P, C>, lease: Lease): Promise<R> | R;
  /**
   * Called when a job of the kind has failed for good, whatever the cause, in the process that recorded it. Best effort: a process that dies
   * in between never calls it, and none that does not provide the handler. What it throws is logged.
   */
  onFailed?(job: JobStatus<P>): Promise<void> | void;
}

/** A class decorated with `@JobHandler`. */
export type HandlerClass<P = never, R = unknown> = new (...args: never[]) => Handler<P, R, never>;

/** The payload's type of a handler class. */
export type PayloadOf<H> = H extends new (...args: never[]) => {
  handle(job: Job<infer P, never>, lease: Lease): unknown;
}
  ? P
  : never;

/** The result's type of a handler class. */
export type ResultOf<H> = H extends new (...args: never[]) => { handle(...args: never[]): infer R }
  ? Awaited<R>
  : never;

export interface JobHandlerOptions extends HandlerOptions {
  /** DTO class with class-validator decorators: checked at enqueue and again before the handler. */
  payload?: Type<object>;
  /** Jobs with the same key share `concurrencyPerKey` places in the whole fleet; undefined: none. Called at enqueue. */
  concurrencyKey?: (payload: never) => string | undefined;
  /** The format of this kind's checkpoints, which outlive deploys. Default version 1. */
  checkpoint?: CheckpointFormat;
  /** Name of the lease instance, for applications with two. Default 'default'. */
  instance?: string;
}

export interface CheckpointFormat {
  /** A whole number from 1; larger for every later format. */
  version: number;
  /** Makes one of this version of an older one. Without it, an older one fails the attempt. */
  upgrade?: (checkpoint: unknown, version: number) => unknown;
}

export interface HandlerMetadata {
  kind: string;
  options: JobHandlerOptions;
}
