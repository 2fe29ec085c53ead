import type { Type } from '@nestjs/common';
import type { Job } from '../jobs/job.types';
import type { HandlerOptions } from '../options/lease-options';
import type { Lease } from './lease';

/**
 * Runs jobs of one kind. What it returns is stored as the result; what it throws fails the attempt (NonRetryableError: for good,
 * SnoozeError: later, without spending an attempt). When `lease.signal` aborts it should stop at its next boundary, by throwing.
 * A job runs *at least once*: effects outside the database need `lease.token` or `lease.key(item)`.
 */
export interface Handler<P = unknown, R = unknown> {
  handle(job: Job<P>, lease: Lease): Promise<R> | R;
}

/** A class decorated with `@JobHandler`. */
export type HandlerClass<P = never, R = unknown> = new (...args: never[]) => Handler<P, R>;

/** The payload's type of a handler class. */
export type PayloadOf<H> = H extends new (...args: never[]) => { handle(job: Job<infer P>, lease: Lease): unknown }
  ? P
  : never;

/** The result's type of a handler class. */
export type ResultOf<H> = H extends new (...args: never[]) => { handle(...args: never[]): infer R }
  ? Awaited<R>
  : never;

export interface JobHandlerOptions extends HandlerOptions {
  /** DTO class with class-validator decorators: checked at enqueue and again before the handler. */
  payload?: Type<object>;
  /** Name of the lease instance, for applications with two. Default 'default'. */
  instance?: string;
}

export interface HandlerMetadata {
  kind: string;
  options: JobHandlerOptions;
}
