import type { HeldLease } from './held-leases';
import type { Lane } from './wake-up';

/** What a claim asks for. `limits[i]` bounds the kind of `lanes[i]`. */
export interface ClaimRequest {
  workerId: string;
  want: number;
  lanes: Lane[];
  limits: number[];
  /** Of each lane how many of its queue this process may take, over all its lanes; null: any number. */
  queueLimits?: (number | null)[];
  /** Of each lane how many jobs of its kind may run in the whole fleet; null: any number. */
  fleet?: (number | null)[];
  /** 0 = take no suspect, 1 = take one if nothing else is to be had, 2 = take nothing else. */
  suspects: 0 | 1 | 2;
}

export type ClaimReply =
  /** `empty`: lanes that held nothing else. */
  | { ok: true; leases: HeldLease[]; empty: Lane[] }
  /** The database holds this worker for dead, draining or expired. */
  | { ok: false; refused: true }
  /** The reply was lost; what it may have leased comes back as unknown at the next beat and is given back. */
  | { ok: false; refused: false };

/** Offers a claim to ride along whenever something is sent. Returns undefined to claim nothing. */
export interface Claimer {
  next(): ClaimRequest | undefined;
  receive(request: ClaimRequest, reply: ClaimReply): void;
}
